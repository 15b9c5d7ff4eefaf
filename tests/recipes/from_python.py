# recipe: From Python
import sys
import syncguard

client = syncguard.Client(sys.argv[1])                # one per program
try:
    with client.lock("app:prod:import", ttl=10, timeout=5) as guard:
        for step in range(3):
            if guard.lost:                            # by this process's clock, no network
                break
            print("step", step, "under fence", guard.fence)
except syncguard.AcquisitionTimeout:
    sys.exit("somebody else imports")
# end
